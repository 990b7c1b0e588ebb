"""Scans whose time is shared out among ranks."""
