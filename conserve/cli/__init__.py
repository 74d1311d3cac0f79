"""The commands: parse, call, render. One module a command."""
