"""The commands of `offbeat`, one module each.

Each module defines `command`: its parameters are the command's arguments and options, its docstring is the help text.
A group of commands defines `app` too, with `command` as its callback.
"""
