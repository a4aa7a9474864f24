"""Configuration: the feature spec, the settings of services, and the forms that both are described by."""
