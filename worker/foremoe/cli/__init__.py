"""The `foremoe` command, one module per sub-command."""
