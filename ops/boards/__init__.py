"""Grafana's boards, made from short descriptions: `python -m ops.boards` writes them."""
