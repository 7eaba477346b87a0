"""The command line: asks the gateway over HTTP as anyone would, and starts the roles."""
