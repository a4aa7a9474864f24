"""Configuration: the feature spec, the settings of services, and the forms of their values."""
