"""Problems beyond loss minimisation, a folder a problem; one driver, one face of results."""
