"""The mesh: what runs between the gateway and the ledger (contract, backplane, bidding, node)."""
