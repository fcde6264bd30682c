"""What is tuned: a problem on a device, with its configs, and what is known of them before they are measured."""
