"""How the services are started: command line, one-machine launcher, quick start, report, configs."""
