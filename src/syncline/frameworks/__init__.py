"""Adapters: what a framework's model, gradients and optimizer have to do with a session. Hooks only, one folder each."""
