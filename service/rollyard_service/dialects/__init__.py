"""Other services' interfaces, spoken by this gateway: their clients work unchanged."""
