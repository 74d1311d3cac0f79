"""Generated parts of the documentation: the commands' page from their help, the charts from the pages' tables."""
