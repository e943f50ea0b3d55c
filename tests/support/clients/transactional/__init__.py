"""Transactional producers of several clients."""
