"""The engines that ConServe runs itself."""
