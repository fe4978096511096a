"""The Realtime protocol of OpenAI, over a WebSocket."""
