"""The command line: one file per noun, one function per command."""
