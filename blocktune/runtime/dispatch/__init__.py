"""From a call of attention to a launched kernel: keys, plans, autograd and torch.compile."""
