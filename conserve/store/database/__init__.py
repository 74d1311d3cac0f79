"""The database: connections, tables, migrations."""
