"""`tune ui`: the report's views in a browser, live: a server on this machine that only reads the database."""
