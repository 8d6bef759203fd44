"""The harness: experiments, their store and the report. Needs ``mvngrad[lab]``; nothing else imports it."""
