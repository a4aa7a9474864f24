"""Logs, metrics, traces and the audit trail."""
