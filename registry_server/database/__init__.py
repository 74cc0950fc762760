"""What the server knows: tables, connections, migrations."""
