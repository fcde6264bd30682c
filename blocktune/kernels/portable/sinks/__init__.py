"""Attention sinks: what a logit of every head that joins the softmax changes of finished rows."""
