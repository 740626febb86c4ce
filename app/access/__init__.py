"""Who may use the service and how much: API keys, tenants, rate limits, fair turns."""
