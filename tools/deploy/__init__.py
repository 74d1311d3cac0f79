"""What operators install: the dashboard, the page on the chart's values, and checks of deploy/."""
