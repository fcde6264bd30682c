"""What commands that judge the search keep in files, and the tables that are made of them."""
