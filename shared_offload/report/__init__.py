"""What people see: progress, tables, metrics, traces."""
