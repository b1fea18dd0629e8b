"""What a service tells people and monitors: rows of metrics, logs, the folder of a run, small web pages."""
