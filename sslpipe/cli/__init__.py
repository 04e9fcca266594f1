"""The command line, `sslpipe COMMAND`: one module a command group, loaded when it is used.

A command parses its options, calls the package that does the work, and prints. Start reading in
`app.py`, which lists the commands and reports a user's mistake as one line and exit status 2.
"""
