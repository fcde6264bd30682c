"""Commands about kernels of other people, which `module:function` names."""
