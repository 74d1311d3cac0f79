"""A job's life: read its input, render its requests, harvest the answers, retry and recover."""
