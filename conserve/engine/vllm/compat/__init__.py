"""Every internal of vLLM that ConServe touches, and the versions that have it. No other room asks for a version."""
