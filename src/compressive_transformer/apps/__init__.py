"""Applications on top of the library: the demo, inspection, experiments and the server. Nothing else imports them."""
