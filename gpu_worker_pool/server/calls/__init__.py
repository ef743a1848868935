"""The handlers of the HTTP calls, and the views they answer with."""
