"""Rollyard as a tool in agent and RL frameworks; each module needs the framework it is named for.

The rule in all of them: what the program did becomes text for the model; a fault of the service
never does. It raises :class:`rollyard.integrations.observation.ServiceFault`, or is marked where
the framework can carry a mark.
"""
