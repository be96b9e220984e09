"""Packages as their authors write them: what tests they have of their own run where the packages are
installed."""

collect_ignore_glob = ["*"]
