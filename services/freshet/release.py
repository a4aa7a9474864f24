"""Which freshet this is: the package's metadata, the command, the services and the documents read it here."""

RELEASE = "0.1.0"
