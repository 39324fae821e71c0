"""Quotas: the limits of external APIs, and the rate that is used after an API has refused a request."""
