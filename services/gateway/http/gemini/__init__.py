"""Gemini's generateContent API, on the turns of the gateway."""
