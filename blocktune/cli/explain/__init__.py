"""Commands that explain a config, a device or a machine."""
