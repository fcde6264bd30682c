"""What tests share: stand-ins, cases, and programs that tests run as processes of their own."""
