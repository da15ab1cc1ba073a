"""Digits on clients with unequal labels, under Flower: a server app and a client app."""
