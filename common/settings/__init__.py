"""The settings of a run: declared, completed, checked, read and written."""
