"""What a client and a server do, wherever they run: a prepared model, terms, a site, a server, the wire."""
