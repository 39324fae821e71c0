"""Quotas: what external APIs allow, and how much of it is used after an API has refused a request."""
