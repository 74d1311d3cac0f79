"""Tools for deploy/: the dashboard, the page on the chart's values, and checks."""
