"""One fresh operating-system process for each intent."""
