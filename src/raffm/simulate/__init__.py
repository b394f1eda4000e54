"""Simulation: backends that are faster than the serial one."""
