"""Adapters: how a framework's models, gradients and optimizers use a session. Hooks only, one folder each."""
