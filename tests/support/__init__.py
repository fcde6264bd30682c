"""What tests share: stand-ins, cases, and what is right for them."""
