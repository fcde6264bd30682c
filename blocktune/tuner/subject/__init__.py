"""Subjects of tuning: a problem on a device, with its configs, and the facts about them before they are measured."""
