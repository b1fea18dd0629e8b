"""The commands of `offbeat`, one module for each panel of `offbeat --help`: their options and help, and nothing else.

The function `NAME_command` is the command NAME: its parameters are the arguments and options, its docstring is the help text.
Modules with many subjects import what one command needs when it runs. A group of commands has an `app`.
"""
