"""Output of a service for people and monitors: rows of metrics, logs, the folder of a run, small web pages."""
